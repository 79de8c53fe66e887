"""Everything specific to SQLite: connections, group commit, the inter-process write lock, tables and migrations."""
