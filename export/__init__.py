"""From a Hugging Face checkpoint to static-shape ONNX graphs with the compression inside them."""
