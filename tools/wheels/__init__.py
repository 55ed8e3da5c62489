"""Wheels of a release, built without a container: `make wheels`.

- `build`: the source distribution, and from it a wheel for each Python on each platform
- `check`: what a wheel must and must not contain
- `smoke`: install a wheel from an index on loopback, and run `smoke_test` there
- `table`: write what was built and tested into the documentation

`targets` has the list of Pythons and platforms, `toolchain` the compilers, `headers` and `debian` the headers of each
Python, and `index` the package index.
"""
