"""One file per benchmark, and the peers they run against."""
