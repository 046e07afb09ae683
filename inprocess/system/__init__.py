"""The operating system and the interpreter: time, processes, descriptors, logs. Knows nothing of restarts."""
