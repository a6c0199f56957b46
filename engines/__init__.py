"""From an ONNX graph to something that runs: the bundle format, ONNX Runtime sessions, TensorRT plans."""
