package device

// MissingEngine names an engine that a device of its kind can have and this one hasn't,
// and why: no library of that name, a symbol that it lacks, a version too old. A
// [Driver] that knows has a method Missing() []MissingEngine.
type MissingEngine struct {
	Name string // as Engine.Name has it
	Err  error
}
