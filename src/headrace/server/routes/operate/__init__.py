"""The operator's routes: what runs, who used how much, abort, drain."""
