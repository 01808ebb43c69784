"""The prefix cache: exact for images, keyed by adapter content, shared inside a batch."""
