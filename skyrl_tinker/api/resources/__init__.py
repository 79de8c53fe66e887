"""Bodies of REST answers, built from rows: runs, bills, traces, archives, copies."""
