"""Small models, their tasks and their training; results that are kept on disk; tables and figures."""
