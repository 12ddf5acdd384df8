"""PaTH attention, whose positions are products of Householder factors, and LUCID on top of it."""
