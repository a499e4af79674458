"""The domains of operators besides ai.onnx, and the opset of a model that imports none."""

MICROSOFT = "com.microsoft"  # ONNX Runtime's own operators
NCHWC = "com.microsoft.nchwc"  # those in the layout of a processor
ML = "ai.onnx.ml"
TRAINING = "ai.onnx.preview.training"
ASSUMED_OPSET = 16  # of ai.onnx, where a model does not import it
