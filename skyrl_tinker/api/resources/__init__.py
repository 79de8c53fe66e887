"""Bodies of REST responses, built from rows: runs, bills, traces, archives, copies."""
