package doctor

// makers are the vendors whose devices are looked at.
func makers(m *Machine, o Options) []maker {
	return nil
}
