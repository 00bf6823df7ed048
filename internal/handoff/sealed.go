package handoff

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// ReadOnly opens the memfd behind fd again, for reading only, and takes the right to
// open it for writing from all other users. The caller closes what it returns. Kinds:
// fault.Invalid, fault.Unsupported (no /proc).
func ReadOnly(fd int) (int, error) {
	if err := unix.Fchmod(fd, 0o600); err != nil {
		return -1, fault.Wrap(fault.Invalid, fmt.Sprintf("descriptor %d", fd), err)
	}
	ro, err := unix.Open(procFile(fd), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fault.Wrap(fault.Unsupported, fmt.Sprintf("descriptor %d: opened again for reading", fd), err).
			Hint("mount /proc")
	}
	return ro, nil
}

func procFile(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

// CheckSealed refuses a descriptor from elsewhere that is not shared memory of at least
// size bytes which nobody can resize any more. Kind: fault.Invalid.
func CheckSealed(fd int, size int64) error {
	const resize = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	what := "shared memory"
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return fault.Wrap(fault.Invalid, what+": the descriptor is not of a memfd", err)
	}
	if seals&resize != resize {
		return fault.New(fault.Invalid, what, "can be resized: its seals are %#x, and must have %#x", seals, resize)
	}
	var st unix.Stat_t
	switch err := unix.Fstat(fd, &st); {
	case err != nil:
		return fault.Wrap(fault.Invalid, what, err)
	case size < 0 || st.Size < size:
		return fault.New(fault.Invalid, what, "of %d bytes, and %d are needed", st.Size, size)
	}
	return nil
}

// MapSealed maps the first size bytes of a descriptor that [CheckSealed] accepts, for
// reading. [Unmap] ends that. The descriptor may be closed before. Kinds: fault.Invalid,
// fault.Memory (no addresses left).
func MapSealed(fd int, size int64) ([]byte, error) {
	if err := CheckSealed(fd, size); err != nil {
		return nil, err
	}
	if size == 0 || int64(int(size)) != size {
		return nil, fault.New(fault.Invalid, "shared memory", "%d bytes can't be mapped", size)
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	switch {
	case err == unix.EACCES || err == unix.EPERM:
		return nil, fault.Wrap(fault.Invalid, "shared memory: the descriptor is not for reading", err)
	case err != nil:
		return nil, fault.Wrap(fault.Memory, fmt.Sprintf("map %d bytes of shared memory", size), err).Hint("raise ulimit -v")
	}
	_ = unix.Madvise(b, unix.MADV_DONTDUMP) // advice: no pages of users' prompts in core dumps
	return b, nil
}

// Unmap ends a mapping of MapSealed. Nothing reads it any more. Kind: fault.Memory.
func Unmap(b []byte) error {
	if err := unix.Munmap(b); err != nil {
		return fault.Wrap(fault.Memory, fmt.Sprintf("unmap %d bytes of shared memory", len(b)), err)
	}
	return nil
}
