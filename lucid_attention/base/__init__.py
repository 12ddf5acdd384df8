"""The bottom: small modules that every room may import and that import none."""
