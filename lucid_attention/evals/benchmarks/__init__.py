"""One file per benchmark that `lucid eval` knows."""
