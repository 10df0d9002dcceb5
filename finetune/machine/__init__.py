"""What a process of training asks of its machine: cores, memory, disks, compilers, and the end of its own life."""
