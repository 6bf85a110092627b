"""How the scenes of `kvfuzz.model.ops` are drawn, and which of them once broke a kernel."""
