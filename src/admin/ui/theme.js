// The colours that the user has chosen, put in force before the page is drawn. Without a choice the system's are used.
{
  const kept = localStorage.getItem("theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
}
