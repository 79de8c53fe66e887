"""Request bodies: read, checked and submitted to the journal."""
