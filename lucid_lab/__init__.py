"""The laboratory: everything that trains, measures and judges. It imports the library, never the other way round."""
