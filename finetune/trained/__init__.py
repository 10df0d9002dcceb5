"""What is done with a finished model: opened, measured, sampled, exported, merged."""
