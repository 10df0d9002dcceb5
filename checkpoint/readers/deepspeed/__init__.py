"""The layouts of DeepSpeed's engines."""
