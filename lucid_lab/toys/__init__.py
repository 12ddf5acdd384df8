"""What claims share: models, tasks and training; results that are kept on disk; tables and figures."""
