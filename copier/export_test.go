package copier

// Every is w for all boxes, for tests of one way.
func Every(w Way) Crossovers { return every(w) }
