"""Trained policies as files for ONNX Runtime and `torch.export`."""
