"""The configuration: typed data, checked at the door."""
