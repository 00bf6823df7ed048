package devicetest

func acceleratorCases() []testCase { return nil }
