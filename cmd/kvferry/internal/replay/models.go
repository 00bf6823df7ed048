package replay

import (
	"slices"
	"strings"

	"github.com/kvferry/kvferry/fault"
)

// model is what decides the size of a page of a published model.
type model struct {
	name         string
	layers       int
	kvHeads, dim int // of K and of V
	latent       int // instead of heads: MLA
	dtype        string
}

// models are the models that --model knows. The dtype is that of the published
// weights, which engines use for the cache unless told otherwise.
func models() []model {
	return []model{
		{name: "llama-3-8b", layers: 32, kvHeads: 8, dim: 128, dtype: "bf16"},
		{name: "qwen2.5-0.5b", layers: 24, kvHeads: 2, dim: 64, dtype: "bf16"},
		{name: "deepseek-v3", layers: 61, latent: 512 + 64, dtype: "bf16"}, // latent and the rotary part of the key
	}
}

// Models returns the names that --model knows.
func Models() []string {
	var names []string
	for _, m := range models() {
		names = append(names, m.name)
	}
	return names
}

func findModel(name string) (model, error) {
	all := models()
	i := slices.IndexFunc(all, func(m model) bool { return m.name == name })
	if i < 0 {
		return model{}, fault.New(fault.Invalid, "--model", "no model %q", name).
			Hint("there are %s; for another, give --layers --kv-heads --head-dim --dtype --layout", strings.Join(Models(), ", "))
	}
	return all[i], nil
}
