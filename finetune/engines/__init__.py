"""What takes a training step: ZeRO (``zero``) or a pipeline of stages (``pipeline``), behind one protocol."""
