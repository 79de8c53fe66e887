"""Everything specific to SQLite: connections, group commit, inter-process lock, tables, migrations."""
