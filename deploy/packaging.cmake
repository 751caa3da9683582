# `cpack -G DEB` in a build folder: one package, sluice_VERSION_ARCH.deb, with the daemons, the client, systemd units and
# their environment files. What it depends on dpkg-shlibdeps finds out (dpkg-dev must be installed).
#
# Files below /etc and /usr/lib/systemd are installed for the package alone (component "package"), so that
# `cmake --install build/release --prefix DIR` stays inside DIR.
set(SLUICE_UNITS sluice-scheduler sluice-server sluice-worker)
foreach(UNIT ${SLUICE_UNITS})
  install(FILES deploy/systemd/${UNIT}.service DESTINATION /usr/lib/systemd/system COMPONENT package EXCLUDE_FROM_ALL)
  install(FILES deploy/systemd/${UNIT}.default DESTINATION /etc/default RENAME ${UNIT} COMPONENT package EXCLUDE_FROM_ALL)
endforeach()
install(FILES README.md docs/deployment.md docs/two_machines.md DESTINATION /usr/share/doc/sluice
  COMPONENT package EXCLUDE_FROM_ALL)
install(DIRECTORY examples/ DESTINATION /usr/share/sluice/examples COMPONENT package EXCLUDE_FROM_ALL)

set(CPACK_PACKAGE_NAME sluice)
set(CPACK_PACKAGE_VENDOR "Sluice")
set(CPACK_PACKAGE_CONTACT "Sluice developers <sluice@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "parameter servers that train a model on many machines")
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION
  "Scheduler, server and worker daemons with systemd units, and the client.\nServers hold slices of model and optimizer, workers push gradients and get\nparameters, the scheduler recovers whatever dies.")
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_DEPENDS "passwd")  # the postinst's useradd
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA
  ${CMAKE_CURRENT_SOURCE_DIR}/deploy/debian/postinst ${CMAKE_CURRENT_SOURCE_DIR}/deploy/debian/prerm
  ${CMAKE_CURRENT_SOURCE_DIR}/deploy/debian/postrm ${CMAKE_CURRENT_SOURCE_DIR}/deploy/debian/conffiles)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_STRIP_FILES ON)
set(CPACK_GENERATOR DEB)
set(CPACK_SOURCE_GENERATOR "")
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_INSTALL_CMAKE_PROJECTS
  "${CMAKE_BINARY_DIR};sluice;Unspecified;/;${CMAKE_BINARY_DIR};sluice;package;/")
include(CPack)
