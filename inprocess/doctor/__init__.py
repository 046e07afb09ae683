"""``inprocess doctor``: what would go wrong with restarts here, before it does. Looks, and changes nothing."""
