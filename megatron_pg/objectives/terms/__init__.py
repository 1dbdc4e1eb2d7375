"""Loss terms in addition to the objective."""
