"""Transport between processes: `local` within a host, `network` between hosts. Independent of actors and meshes."""
