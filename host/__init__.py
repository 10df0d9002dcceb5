"""What the system gives to a process: the limits of its container, and how to start another one."""
