"""A study as a flow: its runs side by side, a search, MLflow's parent and children."""
