"""The devices of a rank: GPU, network interfaces, and memory on them that an iteration has left behind."""
