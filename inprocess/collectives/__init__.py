"""What a restart ends: process groups, their communicators and connections, for Gloo and NCCL."""
