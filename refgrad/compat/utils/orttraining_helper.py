"""Names of `onnxcustom.utils.orttraining_helper`."""

from refgrad.rewrites.losses import add_loss_output, get_train_initializer, penalty_loss_onnx

__all__ = ["add_loss_output", "get_train_initializer", "penalty_loss_onnx"]
