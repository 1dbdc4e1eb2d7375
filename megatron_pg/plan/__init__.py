"""From samples to weights: counts, exchange, denominators, token selection, documents."""
