"""DeepSpeed's pipeline: every stage has some of the layers."""
