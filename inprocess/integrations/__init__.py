"""Parts for frameworks, which their users name in their program. Each file imports its framework, and only there."""
