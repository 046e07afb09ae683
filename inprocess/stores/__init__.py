"""The base store: reaching it, serving it, and running the protocol's verbs over it; TCPStore and FileStore."""
