"""The references of ops that are about other things than K and V pages."""
