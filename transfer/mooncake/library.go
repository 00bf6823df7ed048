package mooncake

import (
	"bytes"
	"fmt"
	"os"
	"sync"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/dl"
)

// The C ABI, the same in all releases of the 0.3 line.
const (
	requestWords = 5 // struct transfer_request: opcode, source, target, offset, length
	statusWords  = 2 // struct transfer_status: status, bytes

	opRead = 0

	invalidBatch = ^uintptr(0)

	statusInvalid   = 2
	statusCanceled  = 3
	statusCompleted = 4
	statusFailed    = 6
)

// base are the functions of every release. Only some are called; a library that lacks
// one is something else.
var base = [...]string{
	"createTransferEngine", "destroyTransferEngine", "getLocalIpAndPort", "installTransport", "uninstallTransport",
	"openSegment", "openSegmentNoCache", "closeSegment", "removeLocalSegment", "syncSegmentCache",
	"registerLocalMemory", "unregisterLocalMemory", "registerLocalMemoryBatch", "unregisterLocalMemoryBatch",
	"allocateBatchID", "submitTransfer", "getTransferStatus", "freeBatchID",
}

// The oldest release that is used, and what tells it: the name of a setting without
// which a transfer whose peer stands still never ends.
const (
	oldest     = "0.3.13"
	oldestMark = "MC_TCP_PROGRESS_TIMEOUT_SEC"
)

// library is the opened C library. Functions that wrap a status object return 0 or a
// positive code; the others 0 or a negative one; neither is ever tested for more.
type library struct {
	create, destroy, localName, install dl.Func
	openSegment                         dl.Func
	register, unregister                dl.Func
	newBatch, submit, status, freeBatch dl.Func

	file    string
	version string

	strings sync.Mutex
	scratch *dl.Block // guarded by strings; of C strings
}

const scratchWords = 512

// openLibrary opens the libraries in their order. The last is Mooncake's.
// Kinds: fault.NotFound, fault.Unsupported (another library, an old release).
func openLibrary(files []string) (*library, error) {
	opened, err := dl.OpenAll(files...)
	if err != nil {
		return nil, err
	}
	found := map[string]dl.Func{}
	for _, name := range base {
		f := opened.Find(name)
		if f == 0 {
			return nil, fault.New(fault.Unsupported, opened.Name(), "is not Mooncake's transfer engine: it has no function %s", name).
				Hint("name libtransfer_engine.so last: a build with -DBUILD_SHARED_LIBS=ON")
		}
		found[name] = f
	}
	l := &library{
		create: found["createTransferEngine"], destroy: found["destroyTransferEngine"],
		localName: found["getLocalIpAndPort"], install: found["installTransport"],
		openSegment: found["openSegmentNoCache"],
		register:    found["registerLocalMemory"], unregister: found["unregisterLocalMemory"],
		newBatch: found["allocateBatchID"], submit: found["submitTransfer"],
		status: found["getTransferStatus"], freeBatch: found["freeBatchID"],
		file: found["createTransferEngine"].File(),
	}
	if l.version, err = release(opened, l.file); err != nil {
		return nil, err
	}
	l.scratch, err = dl.NewBlock(scratchWords)
	return l, err
}

// release says how old the library is, which it can't be asked: by the functions and the
// settings that it has.
func release(l *dl.Library, file string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", fault.Wrap(fault.Unsupported, l.Name()+": its release", err)
	}
	if bytes.Contains(text, []byte(oldestMark)) {
		return oldest + " or later", nil
	}
	is := "before 0.3.5"
	for _, x := range [...]struct{ function, release string }{
		{"submitTransferWithNotify", "0.3.5"}, {"freeNotifsMsgBuf", "0.3.6"}, {"discoverTopology", "0.3.11"}, {"showLinks", "0.3.12"},
	} {
		if l.Find(x.function) != 0 {
			is = x.release
		}
	}
	return "", fault.New(fault.Unsupported, l.Name(), "is of release %s, and %s is needed: older ones let a peer that stands still hold memory for ever", is, oldest).
		Hint("install Mooncake %s or later", oldest)
}

// newEngine makes an engine with one transport. metadata has been checked: a scheme that
// the library was built without ends the process. Kind: fault.Device.
func (l *library) newEngine(metadata, name, protocol string) (engine uintptr, err error) {
	const at, of, to = 0, scratchWords * 3, scratchWords * 6 // bytes of the scratch
	l.strings.Lock()
	defer l.strings.Unlock()
	defer turn(turnLimit)()
	s := l.scratch
	s.PutString(at, metadata)
	s.PutString(of, name)
	s.PutString(to, protocol)
	if engine = l.create.Call(s.Addr+at, s.Addr+of, s.Addr+of, 0, 0); engine == 0 {
		return 0, fault.New(fault.Device, "mooncake engine", "can't be made").Hint("its log says why: Options.Log")
	}
	if l.install.Call(engine, s.Addr+to, 0) == 0 {
		l.destroy.Call(engine)
		return 0, fault.New(fault.Device, "mooncake engine", "transport %s can't be installed", protocol).Hint("its log says why: Options.Log")
	}
	return engine, nil
}

// name returns what peers know the engine by where it is not named: host:port. Kind:
// fault.Device.
func (l *library) name(engine uintptr) (string, error) {
	l.strings.Lock()
	defer l.strings.Unlock()
	if rc := int32(l.localName.Call(engine, l.scratch.Addr, scratchWords*8)); rc != 0 {
		return "", fault.New(fault.Device, "mooncake engine", "doesn't tell its name: code %d", rc)
	}
	return l.scratch.String(0), nil
}

// open finds a peer. That it is found doesn't say that it lives. Kind: fault.NotFound.
func (l *library) open(engine uintptr, name string) (segment int32, err error) {
	b, err := dl.NewBlock(len(name)/8 + 1)
	if err != nil {
		return 0, err
	}
	defer b.Free()
	b.PutString(0, name)
	// Of its own block, and unlocked: it waits for the network.
	if segment = int32(l.openSegment.Call(engine, b.Addr)); segment < 0 {
		return 0, fault.New(fault.NotFound, "owner at "+name, "is not reached: code %d", segment)
	}
	return segment, nil
}

// location is what the library is told about where memory lies: of host memory it need
// not know.
const location = "cpu:0"

// remember registers memory that peers may reach.
func (l *library) remember(engine, addr uintptr, bytes int64, remote bool) error {
	l.strings.Lock()
	defer l.strings.Unlock()
	l.scratch.PutString(0, location)
	var flag uintptr
	if remote {
		flag = 1
	}
	if rc := int32(l.register.Call(engine, addr, uintptr(bytes), l.scratch.Addr, flag)); rc != 0 {
		return fault.New(fault.Device, fmt.Sprintf("mooncake: registration of %d bytes", bytes), "code %d", rc)
	}
	return nil
}

// forget ends what remember began. It waits for nothing that reads the memory.
func (l *library) forget(engine, addr uintptr) error {
	if rc := int32(l.unregister.Call(engine, addr)); rc != 0 {
		return fault.New(fault.Device, "mooncake: end of a registration", "code %d", rc)
	}
	return nil
}
