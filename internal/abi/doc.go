// Package abi holds what kvferry knows of the binary interfaces of CUDA and HIP, as
// tables: the functions it calls and the version that brought their form, the structs
// that it fills in, the numbers of attributes and flags, the codes of errors and what
// they mean.
//
// No vendor's header is needed to build kvferry, so the tables are held to the headers
// by tests: the text of each table is committed for each version of the headers, and
// where the headers are at hand (in CI they must be) the system's C compiler says
// whether it is true, types of arguments included.
//
// # Traps
//
//   - A name does not say which form of a function it is. cuMemcpyBatchAsync takes nine
//     words from CUDA 12.8 and eight from 13.0; the driver has both under two names, the
//     runtime has either under one.
//   - hipMemoryType was renumbered in HIP 6, and hipMemAllocationProp was laid out anew:
//     nothing here uses the first, nor the second before 6.0.
//   - The importer of a file descriptor takes the address of the descriptor before HIP
//     7.1 and the descriptor itself from then on, under one name.
package abi
