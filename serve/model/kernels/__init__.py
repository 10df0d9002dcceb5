"""Native kernels, built from the sources beside this file on the machine that runs them."""
