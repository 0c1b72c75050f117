"""What a checkpoint is: its file, its tensors, its layers. No maths, and no code from a file is ever run."""
