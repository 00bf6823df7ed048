package abi

// Layout is a struct of a vendor's headers: its size, and where the fields lie that
// kvferry uses.
type Layout struct {
	Name   string
	Since  int // the first version of the headers that has it so
	Bytes  int
	Fields []Field
}

// Field is a field of a struct: its offset and size in bytes.
type Field struct {
	Name       string
	Off, Bytes int
}

// Constant is an enumerator or a macro of a vendor's headers.
type Constant struct {
	Name  string
	Since int // the first version of the headers that has it
	Value int
}

// Table is all of one library's interface.
type Table struct {
	Layouts   []Layout
	Constants []Constant
	Calls     []Call
	Errors    []Error
}
