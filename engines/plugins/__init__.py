"""Kernels of the two operators for GPU and CPU, the TensorRT plugins, the ONNX Runtime library, and their build."""
