"""Choice of the next work: lanes by seq_id, fair shares of tenants, units of work. Pure code without I/O."""
