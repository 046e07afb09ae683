"""What users run on their own training functions; nothing else in the library depends on it."""
