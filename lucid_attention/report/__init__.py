"""Pictures and tables from records. Reads numbers, computes none."""
