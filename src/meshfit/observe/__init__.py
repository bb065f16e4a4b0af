"""What happened, for people: reads steps and events, never the other way round."""
